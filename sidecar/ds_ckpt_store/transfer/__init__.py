"""The data path: part plan, parallel upload and download under one budget."""
