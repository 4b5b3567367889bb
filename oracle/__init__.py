"""What is right: references, budgets, laws and wrong answers of every op; no kernel is imported here."""
