"""Who asks, what they may reuse, and what they may read: principals, scopes, grants, and the record of changes."""
