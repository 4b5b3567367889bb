"""Who answers: the implementations of every op, and what runs and finds them; no reference is imported here."""
