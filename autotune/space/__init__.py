"""The search space: parameters, conditions and constraints."""
