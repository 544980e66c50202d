"""`python -m assocscan bench`: how fast and how exact the scans are here, beside their peers.

One file is one suite: a function from `Settings` to the cases that it times, listed in `SUITES`
(`suites`). A case names its contenders and knows the right result (`measuring/checks`, by the
float64 scan of `measuring/reference`). `measuring/runner` checks and times each; `output` writes,
prints and draws what came out. A peer that is not installed is named, never left out silently.
"""
