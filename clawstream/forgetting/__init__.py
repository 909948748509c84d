"""Forgetting a session or a principal: what holds their data, what is removed, and who refuses what is left."""
