"""What was asked, seen and decided: schemas, statistics and files of evidence. Nothing here imports torch."""
