"""A real federation: hospitals and a coordinator on Flower, with the simulator's own numbers.

settings.py     federation.toml and site.toml
contract.py     what both sides compare before the first round
parcel.py       what a message holds, and the codes that stand for errors
site.py         a hospital: its policy, its answers, its audit log; holding.py its data, ownstate.py its state
coordinator.py  the rounds: quorum, time limit, checkpoint; members.py who is there, describe.py run.json
app.py          Flower's ClientApp and ServerApp around the two
link.py         the coordinator's machine; node.py a hospital's; processes.py Flower's programs under both
founding.py     a new federation's folder; certificates.py what is in it
"""
