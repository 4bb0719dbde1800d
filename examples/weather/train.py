"""Learn to forecast from an xarray dataset, in chunks of time that overlap. README.md explains it.

headway run --nproc 2 examples/weather/train.py
headway run --nproc 8 examples/weather/train.py --data era5.zarr --variable 2m_temperature
headway submit --nodes 2 --gpus-per-node 4 examples/weather/train.py --data $PWD/era5.zarr
"""

import argparse

import numpy as np
import torch
import xarray as xr
from torch import nn

import headway as hw

CHUNK, LEAD = 24, 6  # hours that are read together, and hours from a state to its forecast


def made_up(hours=24 * 60):
    """A wave that travels east and decays toward the poles: temperature[time, latitude, longitude]."""
    time = np.arange(hours)[:, None, None]
    latitude, longitude = np.linspace(-87.5, 87.5, 18), np.arange(0, 360, 10)
    wave = np.sin(np.radians(3 * longitude - 5.0 * time)) * np.cos(np.radians(latitude))[:, None]
    wave = wave + 0.05 * np.random.default_rng(0).standard_normal(wave.shape)
    dims = ("time", "latitude", "longitude")
    array = xr.DataArray(
        wave.astype(np.float32), dims=dims, coords={"latitude": latitude, "longitude": longitude}
    )
    return xr.Dataset({"2m_temperature": array})


class Forecaster(nn.Module):
    """Predicts the change within `LEAD` hours. Longitudes are a circle, so convolutions go around it."""

    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(n, m, 3) for n, m in ((1, width), (width, width), (width, 1)))

    def forward(self, state):
        x = state[:, None]
        for number, layer in enumerate(self.layers):
            x = nn.functional.pad(x, (1, 1, 0, 0), mode="circular")
            x = layer(nn.functional.pad(x, (0, 0, 1, 1), mode="replicate"))
            x = torch.relu(x) if number < len(self.layers) - 1 else x
        return state + x[:, 0]


class Forecast(hw.TrainValStage):
    def step(self, chunk):  # time x latitude x longitude
        states, latitude = chunk
        error = self.models["net"](states[:-LEAD]) - states[LEAD:]
        area = torch.cos(torch.deg2rad(latitude))[:, None]  # cells are smaller toward the poles
        persistence = states[:-LEAD] - states[LEAD:]
        # what a forecast must beat: that nothing changes
        self.log("persistence", mean_square(persistence, area), weight=len(persistence))
        return mean_square(error, area)

    def count_samples(self, chunk):
        return len(chunk[0]) - LEAD


def mean_square(error, area):
    return (error.square() * area).mean() / area.mean()


def chunks(data, *, shuffle):
    """Loads chunks of `CHUNK` hours, each with the first `LEAD` hours of the next, so that no pair of hours is lost."""
    dataset = hw.data.ShardedXrDataset(data, "time", CHUNK, chunk_overlap=LEAD, shuffle=shuffle, load=True)
    return hw.data.DataLoader(dataset, batch_size=None, collate_fn=to_tensors)


def to_tensors(chunk):
    return torch.from_numpy(chunk.values), torch.from_numpy(chunk["latitude"].values.astype(np.float32))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="a Zarr store; without it, data is made up")
    parser.add_argument("--variable", default="2m_temperature")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args()
    data = (xr.open_zarr(options.data) if options.data else made_up())[options.variable]
    last = len(data["time"]) * 9 // 10  # the last tenth is for validation

    pipe = hw.Pipeline(config=options, name="weather")
    hw.seed(0)
    pipe.register_model("net", Forecaster())
    pipe.register_optimizer("adamw", lambda params: torch.optim.AdamW(params, lr=3e-3), model="net")
    pipe.register_dataset("train", chunks(data.isel(time=slice(None, last)), shuffle=True))
    pipe.register_dataset("val", chunks(data.isel(time=slice(last, None)), shuffle=False))
    stage = Forecast()
    stage.add_column("val/persistence")
    pipe.append_stage(stage, max_epochs=options.epochs)
    pipe.enable_checkpointing(every="10min", keep_best="val/loss")
    pipe.run()


if __name__ == "__main__":
    main()
