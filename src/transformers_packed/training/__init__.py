"""Training on packed rows: the Trainer integration, losses per document, sequence parallelism and callbacks."""
