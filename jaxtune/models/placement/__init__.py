"""Where arrays are: tensors and rows that are divided over the devices of a mesh (partition.py), gathered and
scattered (gathers.py), and the schedules that run these collectives (collectives.py) and copies to and from host
memory (transfers.py) while a layer computes."""
