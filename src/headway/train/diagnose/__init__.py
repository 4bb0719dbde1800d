"""Diagnosis: what is known when training goes wrong, and smoke runs."""
