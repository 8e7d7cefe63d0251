"""The filter: which record goes first. A score is a pure function of one candidate; the smallest is evicted."""

from delta.filter.lines import COSTLESS, LINES
from delta.filter.rested import Rested
from delta.filter.scores import SCORES, Candidate, Score
from delta.filter.victims import Victims

__all__ = ["COSTLESS", "LINES", "SCORES", "Candidate", "Rested", "Score", "Victims"]
