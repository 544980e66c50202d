"""Derivatives of programs: rules, adjoints, Jacobians, tangents, the check against autograd."""
