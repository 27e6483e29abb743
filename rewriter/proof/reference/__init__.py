"""The float64 reference: its engines, its operators, and the audit of both."""
