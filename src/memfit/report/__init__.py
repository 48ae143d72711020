"""Views of plans, profiles and results: tables for the terminal, CSV. No torch here."""
