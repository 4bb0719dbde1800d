"""What people write: plan files in YAML, and old dlcalc files."""
