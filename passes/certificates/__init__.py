"""Certificates: proved bounds on what head programs are off by."""
