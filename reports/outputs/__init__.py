"""How does a gate read in other programs: test viewers, code scanning, build pages, scripts? A writer each."""
