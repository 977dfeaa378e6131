"""What makes the book: it runs the chapters, and collects their verdicts and parameters."""
