"""What a choice costs and gains: bounds, measurements against them, reports."""
