//! The processes of a demo: a registry, prefill and decode instances, children of this one. They end with it,
//! whatever way it ends: each watches its standard input, which only this process holds open.

use std::{ffi::OsString, fmt, time::Duration};

use kvferry_plan::{Blame, InstanceId, LayoutSpec};
use kvferry_registry::{Client, Group};
use kvferry_server::{InstanceClient, Leg};
use tokio::time::{sleep, timeout};

use crate::{
    args::{DemoArgs, EngineArgs},
    child::Child,
    failure::Failure,
    model::Located,
    transports::Transports,
};

/// For instances to reach the registry.
const REGISTER: Duration = Duration::from_secs(10);

/// A transport, and why it is that one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Over {
    pub(super) transport: String,
    pub(super) why: String,
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.transport, self.why)
    }
}

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

/// The instances of one side, and what all of them are told.
pub(super) struct Side<'a> {
    pub(super) role: &'static str,
    pub(super) layouts: &'a [LayoutSpec],
    pub(super) engine: &'a EngineArgs,
}

/// Processes that know each other.
pub(super) struct Fleet {
    registry: Child,
    url: String,
    instances: Vec<Child>,
}

impl Fleet {
    /// Starts a registry.
    pub(super) async fn start() -> Result<Self, Failure> {
        let (registry, url) = Child::start("registry", "registry-0", Vec::new())?.ready().await?;
        Ok(Self { registry, url, instances: Vec::new() })
    }

    /// Starts the instances of two sides together, and waits until the registry knows all of them.
    pub(super) async fn join(
        &mut self,
        sides: [Side<'_>; 2],
        model: &Located,
    ) -> Result<[Vec<Handle>; 2], Failure> {
        let mut started = Vec::new();
        for Side { role, layouts, engine } in &sides {
            for (number, layout) in layouts.iter().enumerate() {
                let name = format!("{role}-{number}");
                started.push((self.begin((role, &name), layout, engine, model)?, layout));
            }
        }
        let mut handles = Vec::new();
        for (child, layout) in started {
            handles.push(self.know(child, layout).await?);
        }
        let [first, _] = sides;
        let second = handles.split_off(first.layouts.len());
        Ok([handles, second])
    }

    /// Starts one more decode instance, with a model of its own, and waits until the registry knows it.
    pub(super) async fn decode(
        &mut self,
        name: &str,
        layout: &LayoutSpec,
        engine: &EngineArgs,
        model: &Located,
    ) -> Result<Handle, Failure> {
        let child = self.begin(("decode", name), layout, engine, model)?;
        self.know(child, layout).await
    }

    fn begin(
        &self,
        (role, name): (&'static str, &str),
        layout: &LayoutSpec,
        engine: &EngineArgs,
        model: &Located,
    ) -> Result<Child, Failure> {
        let mut list: Vec<OsString> = vec!["--registry".into(), self.url.clone().into()];
        list.extend(["--model".into(), model.argument(), "--layout".into()]);
        list.push(layout.to_string().into());
        list.extend(engine.to_args());
        Child::start(role, name, list)
    }

    /// Waits until an instance serves and the registry knows it.
    async fn know(&mut self, child: Child, layout: &LayoutSpec) -> Result<Handle, Failure> {
        let (child, url) = child.ready().await?;
        let group = registered(&Client::new(&self.url)?, &InstanceId(child.instance().to_owned())).await?;
        let (client, pid) = (InstanceClient::new(&url)?, child.pid());
        self.instances.push(child);
        Ok(Handle { client, group, layout: layout.clone(), pid })
    }

    /// Ends the processes in order.
    pub(super) async fn stop(self) {
        for child in self.instances {
            child.stop().await;
        }
        self.registry.stop().await;
    }
}

/// The processes of one pair.
pub(super) struct Cluster {
    pub(super) prefill: Handle,
    pub(super) decode: Handle,
    /// What is going to move the cache, unless no link comes about.
    pub(super) over: Option<Over>,
    fleet: Fleet,
}

impl Cluster {
    /// Starts the processes and waits until they know each other.
    pub(super) async fn start(args: &DemoArgs, model: &Located) -> Result<Self, Failure> {
        let mut fleet = Fleet::start().await?;
        let [from, to] = engines(args)?;
        let side = |role, layout, engine| Side { role, layouts: std::slice::from_ref(layout), engine };
        let sides = [side("prefill", &args.prefill, &from), side("decode", &args.decode, &to)];
        let [prefill, decode] = fleet.join(sides, model).await?;
        let one = |side: Vec<Handle>| {
            side.into_iter().next().ok_or_else(|| Failure::new(Blame::Us, "an instance was not started"))
        };
        let choice = Transports::choice(&from.transport, &to.transport);
        let over = choice.map(|choice| Over { transport: choice.transport.to_owned(), why: choice.why });
        Ok(Self { prefill: one(prefill)?, decode: one(decode)?, over, fleet })
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
            (
                "hand-off over",
                self.over.as_ref().map_or("nothing that both have".into(), ToString::to_string),
            ),
        ]
    }

    /// Ends the processes in order.
    pub(super) async fn stop(self) {
        self.fleet.stop().await;
    }
}

/// What the two sides are told.
fn engines(args: &DemoArgs) -> Result<[EngineArgs; 2], Failure> {
    let lists = args.sides.of(&args.engine.transport, (1, 1))?;
    let told = |list: Vec<Transports>| {
        let transport = list.into_iter().next().unwrap_or_else(|| args.engine.transport.clone());
        EngineArgs { transport, ..args.engine.clone() }
    };
    Ok(lists.map(told))
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
