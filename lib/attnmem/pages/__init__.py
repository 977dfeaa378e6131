"""What chapters use: verdicts, figures, laws fitted to curves, and an experiment in one form."""
