"""`transformers-packed train`: fine-tune a supported model on packed rows. Sits on top of data, models and ops."""
