"""`tfdist manifest`: what Kubernetes needs to run a job."""
