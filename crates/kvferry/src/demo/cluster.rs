//! The processes of a demo: a registry, a prefill and a decode instance, children of this one. They end with it,
//! whatever way it ends: each watches its standard input, which only this process holds open.

use std::{ffi::OsString, time::Duration};

use kvferry_plan::{Blame, InstanceId, LayoutSpec};
use kvferry_registry::{Client, Group};
use kvferry_server::{InstanceClient, Leg};
use tokio::time::{sleep, timeout};

use crate::{
    args::{DemoArgs, name_of},
    child::Child,
    failure::Failure,
    model::Located,
};

/// For instances to reach the registry.
const REGISTER: Duration = Duration::from_secs(10);

/// An instance as the demo speaks to it.
pub(super) struct Handle {
    pub(super) client: InstanceClient,
    pub(super) group: Group,
    layout: LayoutSpec,
    pid: u32,
}

impl Handle {
    /// As one side of a room.
    pub(super) fn leg(&self) -> Leg {
        Leg { instance: self.group.instance.clone(), client: self.client.clone() }
    }
}

/// The running processes.
pub(super) struct Cluster {
    pub(super) prefill: Handle,
    pub(super) decode: Handle,
    transport: String,
    children: Vec<Child>,
}

impl Cluster {
    /// Starts the processes and waits until they know each other.
    pub(super) async fn start(args: &DemoArgs, model: &Located) -> Result<Self, Failure> {
        let registry = Child::start("registry", "registry-0", Vec::new())?;
        let (registry, url) = registry.ready().await?;
        let instance = |role: &'static str, layout: &LayoutSpec| {
            let mut list: Vec<OsString> = vec!["--registry".into(), url.clone().into()];
            list.extend(["--model".into(), model.argument(), "--layout".into(), layout.to_string().into()]);
            list.extend(args.engine.to_args());
            Child::start(role, &format!("{role}-0"), list)
        };
        let (prefill, decode) = (instance("prefill", &args.prefill)?, instance("decode", &args.decode)?);
        let ((prefill, prefill_url), (decode, decode_url)) =
            tokio::try_join!(prefill.ready(), decode.ready())?;
        let registry_client = Client::new(&url)?;
        let handle = async |child: &Child, url: &str, layout: &LayoutSpec| {
            let group = registered(&registry_client, &InstanceId(child.instance().to_owned())).await?;
            let client = InstanceClient::new(url)?;
            Ok::<_, Failure>(Handle { client, group, layout: layout.clone(), pid: child.pid() })
        };
        let cluster = Self {
            prefill: handle(&prefill, &prefill_url, &args.prefill).await?,
            decode: handle(&decode, &decode_url, &args.decode).await?,
            transport: name_of(&args.engine.transport),
            children: vec![prefill, decode, registry],
        };
        Ok(cluster)
    }

    /// What runs: names and facts.
    pub(super) fn describe(&self) -> [(&'static str, String); 3] {
        let width = [&self.prefill, &self.decode]
            .map(|at| at.layout.to_string().len())
            .into_iter()
            .max()
            .unwrap_or(0);
        let facts = |at: &Handle| {
            let (layout, ranks) = (at.layout.to_string(), at.group.ranks);
            format!("{layout:<width$}  {ranks} rank{}  pid {}", if ranks == 1 { " " } else { "s" }, at.pid)
        };
        [
            ("prefill", facts(&self.prefill)),
            ("decode", facts(&self.decode)),
            ("hand-off over", self.transport.clone()),
        ]
    }

    /// Ends the processes in order.
    pub(super) async fn stop(self) {
        for child in self.children {
            child.stop().await;
        }
    }
}

/// Waits until the registry knows `instance`.
async fn registered(registry: &Client, instance: &InstanceId) -> Result<Group, Failure> {
    let look = async {
        loop {
            if let Some(group) = registry.find(instance).await? {
                return Ok(group);
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(REGISTER, look).await.unwrap_or_else(|_| {
        Err(Failure::new(
            Blame::Environment,
            format!(
                "{instance} did not register within {} s; is the machine overloaded?",
                REGISTER.as_secs()
            ),
        ))
    })
}
