//! Runs tests that need the Python package. Without it they are named in the summary as left out; with
//! `KVFERRY_REQUIRE=mooncake` they fail.
#![allow(clippy::print_stdout, reason = "a summary")]

use std::process::ExitCode;

use libtest_mimic::{Arguments, Failed, Trial};

const COMPONENT: &str = "mooncake";

pub(crate) type Test = (String, Box<dyn Fn() + Send>);

/// `there` says what was found, or why nothing was and how to get it.
pub(crate) fn run(arguments: &Arguments, there: &Result<String, String>, tests: Vec<Test>) -> ExitCode {
    let required =
        std::env::var("KVFERRY_REQUIRE").is_ok_and(|list| list.split(',').any(|c| c.trim() == COMPONENT));
    let missing = there.as_ref().err().cloned();
    let count = tests.len();
    let trials = tests.into_iter().map(|(name, test)| {
        let missing = missing.clone();
        let left_out = missing.is_some() && !required;
        let run = move || match missing {
            Some(why) => Err(Failed::from(format!("{COMPONENT} is required: {why}"))),
            None => {
                test();
                Ok(())
            }
        };
        Trial::test(name, run).with_kind(COMPONENT).with_ignored_flag(left_out)
    });
    let conclusion = libtest_mimic::run(arguments, trials.collect());
    match there {
        Ok(what) => println!("components: {COMPONENT} found: {what}"),
        Err(why) => println!(
            "components: {COMPONENT} MISSING, {count} tests {} ({why}; KVFERRY_REQUIRE={COMPONENT} makes this a failure)",
            if required { "failed" } else { "left out" }
        ),
    }
    conclusion.exit_code()
}
