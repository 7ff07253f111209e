//! CPU engine: models, loaders, pools, rank groups, scheduler; defines the HandOff trait.
