//! Runs tests that need something which may not be on the machine, such as a model or somebody's library. Without it they are
//! named in the summary as left out; listed in `KVFERRY_REQUIRE` it makes them fail. Included by test binaries of several crates.

#![allow(clippy::print_stdout, reason = "a summary")]

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

pub(crate) type Test = (String, Box<dyn Fn() + Send>);

/// What some tests need.
pub(crate) struct Component {
    /// As `KVFERRY_REQUIRE` lists it; several names joined by `+` are all needed.
    pub(crate) name: &'static str,
    /// What was found, or why nothing was and how to get it.
    pub(crate) there: Result<String, String>,
    pub(crate) tests: Vec<Test>,
}

/// A list of tests, as [`Component`] takes it.
pub(crate) fn tests(list: &[(&str, fn())]) -> Vec<Test> {
    list.iter().map(|(name, test)| ((*name).to_owned(), Box::new(*test) as Box<_>)).collect()
}

impl Component {
    fn required(&self) -> bool {
        let list = std::env::var("KVFERRY_REQUIRE").unwrap_or_default();
        self.name.split('+').all(|name| list.split(',').any(|listed| listed.trim() == name))
    }

    fn trials(&mut self) -> Vec<Trial> {
        let (name, required) = (self.name, self.required());
        let missing = self.there.as_ref().err().cloned();
        let tests = std::mem::take(&mut self.tests).into_iter();
        let trial = |(test_name, test): Test| {
            let missing = missing.clone();
            let left_out = missing.is_some() && !required;
            let run = move || match missing {
                Some(why) => Err(Failed::from(format!("{name} is required: {why}"))),
                None => {
                    test();
                    Ok(())
                }
            };
            Trial::test(test_name, run).with_kind(name).with_ignored_flag(left_out)
        };
        tests.map(trial).collect()
    }
}

/// Runs the tests of all components, and those that need none.
pub(crate) fn run(arguments: &Arguments, mut components: Vec<Component>, others: Vec<Test>) -> ExitCode {
    let mut trials = Vec::new();
    let mut summary = Vec::new();
    for component in &mut components {
        let (name, count) = (component.name, component.tests.len());
        summary.push(match &component.there {
            Ok(what) => format!("components: {name} found: {what}"),
            Err(why) => format!(
                "components: {name} MISSING, {count} tests {} ({why}; KVFERRY_REQUIRE={} makes this a failure)",
                if component.required() { "failed" } else { "left out" },
                name.replace('+', ",")
            ),
        });
        trials.extend(component.trials());
    }
    trials.extend(others.into_iter().map(|(name, test)| {
        Trial::test(name, move || {
            test();
            Ok(())
        })
    }));
    let conclusion = libtest_mimic::run(arguments, trials);
    summary.iter().for_each(|line| println!("{line}"));
    conclusion.exit_code()
}
