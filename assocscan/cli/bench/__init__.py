"""`python -m assocscan bench`: how fast and how exact the scans are here, beside their peers.

One file is one suite: a function from `Settings` to the cases that it times, listed in `SUITES`
(`suites`). A case names its contenders; `runner` times each, `records` writes what came out,
`plots` draws it. A peer that is not installed is named in the output, never left out silently.
"""
