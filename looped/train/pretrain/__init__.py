"""`looped train`: pretraining under several objectives; `looped report`: runs side by side."""
