"""`looped train-gate`: exit gates distilled on a frozen model, their thresholds and reports."""
