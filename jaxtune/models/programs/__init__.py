"""Compiled programs, and which of them a later start need not trace."""
