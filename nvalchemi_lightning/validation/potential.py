"""The errors of a potential that every validation pass reports."""


class PotentialMetrics:
    def __init__(self, device):
        pass

    def update(self, predictions, batch):
        pass

    def compute(self):
        return {}
