"""The wrapper server: profile -> preflight -> engine -> app -> metrics."""
