//! A peer's control port: what it has, whether it lives, and short messages.

use std::{
    io::Write,
    net::{SocketAddr, TcpStream},
    thread,
    time::{Duration, Instant},
};

use serde::Serialize;

use crate::{
    Description, Lane, Limits, MooncakeError, Notification, stream,
    wire::{self, Alive, Kind, VERSION},
};

/// Before an engine that is starting is asked again.
const PAUSE: Duration = Duration::from_millis(10);

/// A peer, by the address of its control port. Nothing is held open: each message has a connection of its own.
#[derive(Clone, Debug)]
pub struct Peer {
    control: SocketAddr,
    limits: Limits,
}

impl Peer {
    /// A peer of this machine. Nothing is sent yet.
    ///
    /// # Errors
    /// [`MooncakeError::NotLoopback`].
    pub fn new(control: SocketAddr, limits: Limits) -> Result<Self, MooncakeError> {
        if control.ip().is_loopback() {
            Ok(Self { control, limits })
        } else {
            Err(MooncakeError::NotLoopback { address: control })
        }
    }

    /// Where it is.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.control
    }

    /// Asks what it has. `ours` is what it is told of us; engines do not look at it. An engine that has only just opened its
    /// port says `null` and is asked again, for as long as a connection may take to be made.
    ///
    /// # Errors
    /// [`MooncakeError::Version`] for an engine whose writes are not acknowledged, [`MooncakeError::NotReady`] for one that
    /// never says more than `null`, and those of a connection.
    pub fn metadata(&self, ours: &Description) -> Result<Description, MooncakeError> {
        let ours = ours.to_json();
        let deadline = Instant::now() + self.limits.connect;
        let theirs = loop {
            let answer = self.ask(Kind::Metadata, &ours)?;
            if let Some(theirs) = Description::parse(&answer).map_err(|reason| self.protocol(reason))? {
                break theirs;
            }
            if Instant::now() + PAUSE >= deadline {
                return Err(MooncakeError::NotReady { peer: self.control, waited: self.limits.connect });
            }
            thread::sleep(PAUSE);
        };
        if theirs.version < VERSION {
            return Err(MooncakeError::Version { peer: self.control, found: theirs.version });
        }
        Ok(theirs)
    }

    /// Asks whether it lives.
    ///
    /// # Errors
    /// Those of a connection.
    pub fn probe(&self) -> Result<(), MooncakeError> {
        let answer = self.ask(Kind::Probe, &serde_json::Map::new())?;
        match wire::body::<Alive>(&answer) {
            Some(alive) if alive.status == "success" => Ok(()),
            _ => Err(MooncakeError::Rejected { peer: self.control, what: "probe" }),
        }
    }

    /// Tells it something. It has it when this returns.
    ///
    /// # Errors
    /// [`MooncakeError::Rejected`] when it does not want it, and those of a connection.
    pub fn notify(&self, notification: &Notification) -> Result<(), MooncakeError> {
        let answer = self.ask(Kind::Notify, notification)?;
        match wire::body::<Notification>(&answer) {
            Some(taken) if !taken.message.is_empty() => Ok(()),
            _ => Err(MooncakeError::Rejected { peer: self.control, what: "notification" }),
        }
    }

    /// Connects to the data port that it has described.
    ///
    /// # Errors
    /// Those of a connection.
    pub fn lane(&self, theirs: &Description) -> Result<Lane, MooncakeError> {
        let data = SocketAddr::new(self.control.ip(), theirs.data_port);
        Lane::connect(data, &self.limits)
    }

    fn ask(&self, kind: Kind, body: &impl Serialize) -> Result<Vec<u8>, MooncakeError> {
        let wait = self.limits.connect;
        let deadline = Instant::now() + wait;
        let lost = |error| stream::lost(self.control, wait, error);
        let mut stream = TcpStream::connect_timeout(&self.control, wait).map_err(lost)?;
        stream::bound(&stream, wait).map_err(lost)?;
        stream.write_all(&wire::message(kind, body)).map_err(lost)?;
        match stream::hear(&stream, deadline).map_err(lost)? {
            Ok((answered, body)) if answered == kind => Ok(body),
            Ok((answered, _)) => {
                Err(self.protocol(format!("it answers {kind:?} with {answered:?}, which nobody asked for")))
            }
            Err(what) => Err(self.protocol(format!("it answers with {what}"))),
        }
    }

    fn protocol(&self, reason: String) -> MooncakeError {
        MooncakeError::Protocol { peer: self.control, reason }
    }
}
