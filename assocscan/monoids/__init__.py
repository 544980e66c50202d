"""Operators as users write them: Monoid, the registry, raw callables, combinators, pickling."""
