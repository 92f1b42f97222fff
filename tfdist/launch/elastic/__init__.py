"""`tfdist run --elastic`: a worker that dies is replaced while the others go on."""
