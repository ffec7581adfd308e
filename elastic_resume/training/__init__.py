"""The API that training scripts use: `resume()`, `Run` and the wrapping in DDP."""
