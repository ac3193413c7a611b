"""The migration, a page a stage: settings in, record out."""
