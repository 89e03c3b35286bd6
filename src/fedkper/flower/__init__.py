"""A real federation: hospitals and a coordinator on Flower, with the simulator's own numbers.

settings.py     federation.toml and site.toml
contract.py     what both sides compare before the first round
site.py         a hospital: its policy, its data, its own state on its disk, its audit log
coordinator.py  the rounds, with quorum, time limit and checkpoint
app.py          Flower's ClientApp and ServerApp around the two
certificates.py, founding.py, up.py: certificates and keys, a new federation's folder, the processes
"""
