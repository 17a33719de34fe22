"""Campaigns: a panel's pairs of members and quotas, asked for one after the other, and what became of them."""
