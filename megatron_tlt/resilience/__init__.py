"""What keeps a job alive or ends it well."""
