"""Tasks: suites with splits, and which task is drawn next."""
