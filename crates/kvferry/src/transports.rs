//! Lists of transports on the command line, and which instance of a side gets which. Not for which of them a pair
//! uses: that is the pair's own choice.

use std::fmt;

use clap::{Args, ValueEnum};
use kvferry_node::{Choice, TransportKind, choices};
use kvferry_transport_mooncake::sidecar::CAUTION;

use crate::{
    args::{TransportArg, name_of},
    failure::Failure,
    terminal,
};

/// Transports that an instance offers, each once, in the order in which it wants them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Transports(Vec<TransportArg>);

impl Transports {
    /// What `auto` stands for: kvferry's own, which need nothing that is not there. An engine of others costs memory,
    /// threads and a port, so it is started where it is named.
    const AUTO: [TransportArg; 2] = [TransportArg::Shm, TransportArg::Tcp];

    pub(crate) fn kinds(&self) -> Vec<TransportKind> {
        self.0.iter().copied().map(Into::into).collect()
    }

    /// What two sides with these lists will use unless no link comes about, and why; `None` when nothing is common.
    pub(crate) fn choice(prefill: &Self, decode: &Self) -> Option<Choice> {
        let names = |list: &Self| list.kinds().into_iter().map(TransportKind::name).collect::<Vec<_>>();
        choices(&names(prefill), &names(decode)).into_iter().next()
    }
}

impl fmt::Display for Transports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.iter().map(name_of).collect::<Vec<_>>().join(","))
    }
}

/// A list as it is written: names between commas, or `auto`.
pub(crate) fn transports(text: &str) -> Result<Transports, String> {
    if text.trim() == "auto" {
        return Ok(Transports(Transports::AUTO.into()));
    }
    let mut list = Vec::new();
    for name in text.split(',').map(str::trim) {
        let Ok(kind) = TransportArg::from_str(name, false) else {
            let names: Vec<_> = TransportArg::value_variants().iter().map(name_of).collect();
            return Err(match name {
                "" => "a name between commas is empty; write for example shm,tcp".into(),
                "auto" => "`auto` stands alone; name the transports instead, for example shm,tcp,nixl".into(),
                _ => format!("`{name}` is not a transport; use auto, or some of {}", names.join(", ")),
            });
        };
        if list.contains(&kind) {
            return Err(format!("`{name}` is named twice; name each transport once"));
        }
        list.push(kind);
    }
    Ok(Transports(list))
}

/// Says what everybody should know who starts one of these.
pub(crate) fn caution<'a>(lists: impl IntoIterator<Item = &'a Transports>) {
    lists.into_iter().flat_map(|list| &list.0).for_each(|named| caution_of(*named));
}

/// The same of one transport.
pub(crate) fn caution_of(named: TransportArg) {
    if named == TransportArg::Mooncake {
        terminal::note(CAUTION);
    }
}

/// Lists for one side of a cluster.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct SideTransports {
    /// Other transports for prefill than --transport says: one list for all its instances, or one for each, in their order
    #[arg(long, value_name = "LIST", value_parser = transports, help_heading = "Hand-off")]
    pub(crate) prefill_transport: Vec<Transports>,
    /// The same for decode
    #[arg(long, value_name = "LIST", value_parser = transports, help_heading = "Hand-off")]
    pub(crate) decode_transport: Vec<Transports>,
}

impl SideTransports {
    /// The lists of so many prefill and so many decode instances, which are `all` where nothing else is said. Refuses a
    /// number of lists that is neither one nor that of the instances.
    pub(crate) fn of(
        &self,
        all: &Transports,
        (prefill, decode): (usize, usize),
    ) -> Result<[Vec<Transports>; 2], Failure> {
        let side = |role: &str, lists: &[Transports], instances: usize| match lists {
            [] => Ok(vec![all.clone(); instances]),
            [one] => Ok(vec![one.clone(); instances]),
            each if each.len() == instances => Ok(each.to_vec()),
            each => Err(Failure::caller(format!(
                "--{role}-transport is given {} times for {instances} {role} instance{}; give it once, or once for each \
                 --{role}",
                each.len(),
                if instances == 1 { "" } else { "s" }
            ))),
        };
        Ok([
            side("prefill", &self.prefill_transport, prefill)?,
            side("decode", &self.decode_transport, decode)?,
        ])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_as_it_is_shown_and_what_is_wrong_is_named() {
        for text in ["tcp", "shm,nixl,tcp", "mooncake-tcp,shm"] {
            assert_eq!(transports(text).unwrap().to_string(), text);
        }
        assert_eq!(transports("auto").unwrap().to_string(), "shm,tcp");
        for (text, says) in [
            ("tcp,tcp", "`tcp` is named twice"),
            ("tcp,,shm", "is empty"),
            ("", "is empty"),
            ("auto,nixl", "`auto` stands alone"),
            ("rdma", "`rdma` is not a transport; use auto, or some of "),
        ] {
            let error = transports(text).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }

    #[test]
    fn one_list_is_for_all_instances_of_a_side_and_several_for_one_each() {
        let [all, shm, tcp] = ["shm,tcp", "shm", "tcp"].map(|text| transports(text).unwrap());
        let sides = SideTransports {
            prefill_transport: vec![shm.clone()],
            decode_transport: vec![tcp.clone(), shm.clone()],
        };
        let lists = sides.of(&all, (3, 2)).unwrap();
        assert_eq!(lists, [vec![shm.clone(); 3], vec![tcp, shm]]);
        assert_eq!(
            SideTransports::default().of(&all, (1, 1)).unwrap(),
            [vec![all.clone()], vec![all.clone()]]
        );
        let error = sides.of(&all, (3, 1)).unwrap_err().to_string();
        assert!(error.contains("--decode-transport is given 2 times for 1 decode instance;"), "{error}");
    }
}
