"""The director: what happens to a record that goes."""

from delta.director.choice import Choice, Director, Prospect

__all__ = ["Choice", "Director", "Prospect"]
