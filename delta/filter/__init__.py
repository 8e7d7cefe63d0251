"""The filter: which record goes first. A score is a pure function of one candidate; the smallest is evicted."""

from delta.filter.scores import SCORES, Candidate, Score

__all__ = ["SCORES", "Candidate", "Score"]
