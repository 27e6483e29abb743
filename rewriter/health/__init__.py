"""What is installed and what works on this machine: packages, execution providers, libraries, memory and disk."""
