"""What sits on top of data, models and ops: losses of documents, resuming, a guard, and `transformers-packed train`."""
