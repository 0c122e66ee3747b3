"""The typed configuration tree: YAML in, frozen pydantic models out."""
