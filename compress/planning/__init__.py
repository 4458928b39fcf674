"""A recipe and facts about its model and data become a plan: what will be done, and what is wrong, before any work."""
