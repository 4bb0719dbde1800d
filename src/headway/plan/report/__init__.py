"""What people read: estimates with their formulas, tables, and the HTML page."""
