//! Metrics of a registry: who is there.

use kvferry_registry::{Group, Role};
use prometheus_client::metrics::{family::Family, gauge::Gauge};

use super::{Catalogue, KindLabels, StateLabels, instance::whole};
use crate::process::ProcessCounts;

/// All of them, looked up when somebody asks.
#[derive(Debug)]
pub(crate) struct RegistryMetrics {
    catalogue: Catalogue,
    members: Family<KindLabels, Gauge>,
    instances: Family<StateLabels, Gauge>,
    process: Family<KindLabels, Gauge>,
}

impl RegistryMetrics {
    pub(crate) fn new() -> Self {
        let mut all = Catalogue::new();
        Self {
            members: all.add(
                "registry_members",
                None,
                "kind",
                "Processes whose lease runs, by the role of their instance",
                Family::default(),
            ),
            instances: all.add(
                "registry_instances",
                None,
                "state",
                "Instances: whole, or partial while ranks are missing",
                Family::default(),
            ),
            process: ProcessCounts::gauges(&mut all),
            catalogue: all,
        }
    }

    pub(crate) fn catalogue(&self) -> &Catalogue {
        &self.catalogue
    }

    /// Looks up who is there now.
    pub(crate) fn refresh(&self, groups: &[Group]) {
        for (kind, role) in [("prefill", Role::Prefill), ("decode", Role::Decode)] {
            let members = groups.iter().filter(|g| g.role == role).map(|g| g.members.len() as u64).sum();
            self.members.get_or_create(&KindLabels { kind }).set(whole(members));
        }
        for (state, whole_ones) in [("whole", true), ("partial", false)] {
            let count = groups.iter().filter(|g| g.is_whole() == whole_ones).count() as u64;
            self.instances.get_or_create(&StateLabels { state }).set(whole(count));
        }
        ProcessCounts::now().show(&self.process);
    }
}
