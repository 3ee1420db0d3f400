"""A script like vision libraries' references: epochs in functions, warm-up, averaged weights, main process saves."""

import json
import math
import os
import sys
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import lsgd


def is_main_process():
    """Whether this process saves and prints."""
    return not dist.is_initialized() or dist.get_rank() == 0


def reduce_across_processes(value):
    """Return the sum of a number over all processes."""
    total = torch.tensor(value, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.item()


def train_one_epoch(model, criterion, optimizer, data_loader, args, model_ema):
    """Train for an epoch."""
    model.train()
    for step, (image, target) in enumerate(data_loader):
        loss = criterion(model(image), target)
        optimizer.zero_grad()
        loss.backward()
        if args.clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad_norm)
        optimizer.step()
        if step % args.model_ema_steps == 0:
            model_ema.update_parameters(model)


def evaluate(model, criterion, data_loader):
    """Return the mean loss over all test data."""
    model.eval()
    total, number = 0.0, 0
    with torch.inference_mode():
        for image, target in data_loader:
            total += criterion(model(image), target).item() * len(image)
            number += len(image)
    return reduce_across_processes(total) / reduce_across_processes(number)


def load_data(args):
    """Return images with a bright quarter and the number of that quarter, for training and for tests."""

    def images(number, seed):
        generator = torch.Generator().manual_seed(seed)
        target = torch.randint(4, (number,), generator=generator)
        image = torch.randn(number, 1, 8, 8, generator=generator)
        for quarter in range(4):
            row, column = 4 * (quarter // 2), 4 * (quarter % 2)
            image[target == quarter, :, row : row + 4, column : column + 4] += 0.7
        return TensorDataset(image, target)

    dataset, dataset_test = images(960, 1), images(320, 2)
    if args.distributed:
        samplers = DistributedSampler(dataset), DistributedSampler(dataset_test, shuffle=False)
    else:
        samplers = RandomSampler(dataset), SequentialSampler(dataset_test)
    return dataset, dataset_test, *samplers


def main(args):
    """Train, test and save after each epoch."""
    args.distributed = int(os.environ.get("WORLD_SIZE", 1)) > 1
    if args.distributed:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset, dataset_test, train_sampler, test_sampler = load_data(args)
    data_loader = DataLoader(dataset, batch_size=args.batch_size, sampler=train_sampler)
    data_loader_test = DataLoader(dataset_test, batch_size=args.batch_size, sampler=test_sampler)
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.02)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=args.lr_warmup_epochs)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=args.epochs - args.lr_warmup_epochs)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[args.lr_warmup_epochs])
    model_without_ddp = model
    if args.distributed:
        model = nn.parallel.DistributedDataParallel(model)
        model_without_ddp = model.module
    worker = lsgd.wrap(model, optimizer)
    data_loader = worker.shard(data_loader)
    worker.follow(scheduler, lambda: worker.step // len(data_loader))
    decay = math.exp(math.log(0.5) / (len(data_loader) * args.epochs / 8))
    model_ema = torch.optim.swa_utils.AveragedModel(
        model_without_ddp, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    )
    for epoch in range(args.epochs):
        if args.distributed:
            train_sampler.set_epoch(epoch)
        train_one_epoch(model, criterion, optimizer, data_loader, args, model_ema)
        scheduler.step()
        if epoch + 1 == args.epochs or worker.stopped:
            worker.finish()
        tested = evaluate(model, criterion, data_loader_test)
        if is_main_process() and worker.first:
            checkpoint = {"model": model_without_ddp.state_dict(), "ema": model_ema.state_dict(), "epoch": epoch}
            torch.save(checkpoint, Path(args.output_dir, "checkpoint.pth"))
            final = {"val": tested, "lr": scheduler.get_last_lr()[0]}
            Path(args.output_dir, "final.json").write_text(json.dumps(final))
        if worker.stopped:
            break


if __name__ == "__main__":
    options = {"batch_size": 16, "lr": 0.05, "lr_warmup_epochs": 1, "clip_grad_norm": 1.0, "model_ema_steps": 4}
    main(Namespace(output_dir=sys.argv[1], epochs=int(sys.argv[2]), **options))
