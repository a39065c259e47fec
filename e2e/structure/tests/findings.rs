//! Tests the findings in small examples of source code.
#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

use std::collections::BTreeMap;

use cleave_structure::known::{self, ListDifference};
use cleave_structure::parse::Error;
use cleave_structure::{Crate, Finding, Sources, check};

/// Returns sources with one crate named `it`, which consists of these files. The first file is the
/// crate's root.
fn sources(files: &[(&str, &str)]) -> Sources {
    let root = files[0].0.to_owned();
    Sources {
        files: files.iter().map(|(path, text)| ((*path).to_owned(), (*text).to_owned())).collect::<BTreeMap<_, _>>(),
        crates: vec![Crate { name: "it".to_owned(), root }],
        other_files: BTreeMap::new(),
    }
}

fn check_files(files: &[(&str, &str)]) -> Vec<Finding> {
    check(&sources(files)).unwrap()
}

fn finding_texts(files: &[(&str, &str)]) -> Vec<String> {
    check_files(files).into_iter().map(|finding| finding.description).collect()
}

/// Returns the findings in a library of two modules, whose files contain these texts.
fn findings_of_two_modules(a: &str, b: &str) -> Vec<String> {
    finding_texts(&[("src/lib.rs", "mod a;\nmod b;\n"), ("src/a.rs", a), ("src/b.rs", b)])
}

const CYCLE: [&str; 1] = ["cycle it a -> b -> a"];

#[test]
fn a_cycle_is_found_with_the_lines_of_its_uses() {
    let found = check_files(&[
        ("src/lib.rs", "mod a;\nmod b;\nmod c;\n"),
        ("src/a.rs", "use std::fmt;\nuse crate::b::B;\npub struct A(B);\n"),
        ("src/b.rs", "pub struct B(super::c::C);\n"),
        ("src/c.rs", "\n\nuse crate::{\n    a::A,\n};\npub struct C(A);\n"),
    ]);
    assert_eq!(
        found,
        [Finding {
            description: "cycle it a -> b -> c -> a".to_owned(),
            locations: vec![
                "src/a.rs:2 uses b".to_owned(),
                "src/b.rs:1 uses c".to_owned(),
                "src/c.rs:4 uses a".to_owned()
            ],
        }]
    );
}

#[test]
fn uses_in_one_direction_are_not_a_cycle() {
    assert!(findings_of_two_modules("use crate::b::B; pub struct A(B);", "pub struct B;").is_empty());
}

#[test]
fn every_use_within_a_strongly_connected_component_is_in_a_cycle() {
    let found = finding_texts(&[
        ("src/lib.rs", "mod a; mod b; mod c;"),
        ("src/a.rs", "use crate::b::B; use crate::c::C; pub struct A;"),
        ("src/b.rs", "use crate::c::C; pub struct B;"),
        ("src/c.rs", "use crate::a::A; pub struct C;"),
    ]);
    assert_eq!(found, ["cycle it a -> b -> c -> a", "cycle it a -> c -> a"]);
}

#[test]
fn a_child_that_uses_its_parent_makes_a_cycle_if_the_parent_uses_the_child() {
    let child = ("src/a/b.rs", "use super::Shared; pub fn work(_: Shared) {}");
    let declares = ("src/a/mod.rs", "mod b; pub use b::work; pub struct Shared;");
    let calls = ("src/a/mod.rs", "mod b; pub struct Shared; fn run() { b::work(Shared) }");
    assert!(finding_texts(&[("src/lib.rs", "mod a;"), declares, child]).is_empty());
    assert_eq!(finding_texts(&[("src/lib.rs", "mod a;"), calls, child]), ["cycle it a -> a::b -> a"]);
}

#[test]
fn a_parent_that_calls_what_it_re_exports_uses_the_child() {
    let parent = "mod b; pub use b::work; pub struct Shared; fn run() { work(Shared) }";
    let child = ("src/a/b.rs", "use super::Shared; pub fn work(_: Shared) {}");
    assert_eq!(finding_texts(&[("src/lib.rs", "mod a;"), ("src/a.rs", parent), child]), ["cycle it a -> a::b -> a"]);
}

#[test]
fn a_variable_does_not_use_a_function_of_the_same_name() {
    let parent = "mod b; pub use b::work; pub struct Shared; fn run() -> u8 { let work = 1; work }";
    let child = ("src/a/b.rs", "use super::Shared; pub fn work(_: Shared) {}");
    assert!(finding_texts(&[("src/lib.rs", "mod a;"), ("src/a.rs", parent), child]).is_empty());
}

#[test]
fn re_exports_are_followed_to_the_definition() {
    // `c` names `a::B`, which `b` defines, so `c` uses `b` but not `a`. The use of `c` by `a` is
    // therefore not part of a cycle.
    let root = ("src/lib.rs", "mod a; mod b; mod c; pub use c::C;");
    let re_export = ("src/a.rs", "pub use crate::b::B; use crate::C; pub struct A(C);");
    assert!(
        finding_texts(&[
            root,
            re_export,
            ("src/b.rs", "pub struct B;"),
            ("src/c.rs", "use crate::a::B; pub struct C(B);")
        ])
        .is_empty()
    );
    // `c` names `crate::A`, which `a` defines.
    let root = ("src/lib.rs", "mod a; mod b; mod c; pub use a::A; pub use c::*;");
    let found = finding_texts(&[
        root,
        ("src/a.rs", "use crate::C; pub struct A(C);"),
        ("src/b.rs", ""),
        ("src/c.rs", "use crate::A as Other; pub struct C;"),
    ]);
    assert_eq!(found, ["cycle it a -> c -> a"]);
}

#[test]
fn names_are_found_through_module_and_glob_imports() {
    assert_eq!(
        findings_of_two_modules("use crate::b; fn f() { b::g() }", "use super::a::*; pub fn g() { f() }"),
        CYCLE
    );
    assert_eq!(
        findings_of_two_modules(
            "use crate::b as other; fn f() { other::g() }",
            "use crate::a::{self}; fn g() { a::f() }"
        ),
        CYCLE
    );
    // An import of a module, or of all names of a module, is not a use unless a path resolves
    // through the import.
    assert!(findings_of_two_modules("use crate::b; fn f() {}", "use super::a::*; pub fn g() { h() }").is_empty());
}

#[test]
fn a_function_is_distinguished_from_a_module_of_the_same_name() {
    let root = ("src/lib.rs", "mod run; mod b; pub use run::run;");
    let files =
        [root, ("src/run.rs", "use crate::b::B; pub fn run() {}"), ("src/b.rs", "use crate::run; pub struct B;")];
    assert_eq!(finding_texts(&files), ["cycle it run -> b -> run"]);
    let parent = ("src/a.rs", "pub mod run; pub fn run(_: run::X) {}");
    let child = ("src/a/run.rs", "use crate::a::run::X as Y; pub struct X;");
    assert!(finding_texts(&[("src/lib.rs", "mod a;"), parent, child]).is_empty());
}

#[test]
fn circular_imports_do_not_prevent_the_check() {
    assert!(findings_of_two_modules("pub use crate::b::X;", "pub use crate::a::X;").is_empty());
    assert!(findings_of_two_modules("pub use crate::b::*; fn f() { x() }", "pub use crate::a::*;").is_empty());
}

#[test]
fn uses_in_test_code_do_not_cause_findings() {
    let a = "use crate::b::B; pub struct A;";
    for b in [
        "pub struct B; #[cfg(test)] mod tests { use crate::a::A; }",
        "pub struct B; #[cfg(all(test, unix))] use crate::a::A;",
        "pub struct B; #[cfg(test)] mod tests;",
        "pub struct B; #[test] fn f() { crate::a::A; }",
        "pub struct B; impl B { #[cfg(test)] fn f() { crate::a::A; } }",
    ] {
        let files =
            [("src/lib.rs", "mod a; mod b;"), ("src/a.rs", a), ("src/b.rs", b), ("src/b/tests.rs", "use crate::a::A;")];
        assert!(finding_texts(&files).is_empty(), "{b}");
    }
    for b in [
        "pub struct B; #[cfg(not(test))] use crate::a::A;",
        "pub struct B; #[cfg(any(test, feature = \"fake\"))] use crate::a::A;",
        "pub struct B; mod inner { use super::super::a::A; }",
    ] {
        assert_eq!(findings_of_two_modules(a, b), CYCLE, "{b}");
    }
}

#[test]
fn paths_in_macros_and_attributes_are_uses() {
    let a = "use crate::b::B; pub struct A; pub fn f() {}";
    for b in [
        "pub struct B; fn g() { println!(\"{}\", crate::a::f()) }",
        "pub struct B; fn g() { println!(\"{:?}\", vec![super::a::A]) }",
        "pub struct B; macro_rules! m { () => { $crate::a::f() } }",
        "pub struct B { #[serde(default = \"crate::a::f\")] x: u8 }",
        "pub struct B { #[arg(value_parser = crate::a::f)] x: u8 }",
    ] {
        assert_eq!(findings_of_two_modules(a, b), CYCLE, "{b}");
    }
    for b in [
        "pub struct B; fn g() { println!(\"crate::a::f\") }",
        "/// [`crate::a::A`]\npub struct B;",
        "pub struct B; fn g() { println!(\"{}\", other::crate_a::f()) }",
        "pub struct B; pub(in crate::a::A) fn g() {}",
        "pub struct B; macro_rules! a { () => {} } fn g() { a!() }",
    ] {
        assert!(findings_of_two_modules(a, b).is_empty(), "{b}");
    }
}

#[test]
fn a_macro_is_assumed_to_define_unknown_names() {
    assert_eq!(findings_of_two_modules("use crate::b::B; make!(A);", "use crate::a::A; pub struct B;"), CYCLE);
}

#[test]
fn names_of_other_crates_are_not_uses() {
    assert!(
        findings_of_two_modules(
            "use crate::b::B; use ::b::C; pub struct A;",
            "use std::fmt; pub struct B(serde::a::A);"
        )
        .is_empty()
    );
}

#[test]
fn paths_of_other_crates_in_macros_are_not_uses() {
    let child = ("src/a.rs", "use crate::Root; pub fn f() {}");
    let root = |code: &str| format!("mod a; pub struct Root; fn g() {{ println!(\"{{}}\", {code}) }}");
    assert_eq!(finding_texts(&[("src/lib.rs", &root("a::f()")), child]), ["cycle it crate -> a -> crate"]);
    assert!(finding_texts(&[("src/lib.rs", &root("::a::f()")), child]).is_empty());
}

#[test]
fn nested_and_redirected_modules_are_read_from_their_files() {
    let files = [
        ("src/bin/it.rs", "#[path = \"../common.rs\"] mod common; mod outer { pub mod inner; } struct Root;"),
        ("src/common.rs", "use crate::outer::inner::I; pub struct C;"),
        ("src/bin/outer/inner.rs", "use crate::common::C; pub struct I;"),
    ];
    assert_eq!(finding_texts(&files), ["cycle it common -> inner -> common"]);
    let missing = check(&sources(&[("src/lib.rs", "\nmod a;")]));
    assert!(matches!(missing, Err(Error::NoFile { line: 2, .. })), "{missing:?}");
    let broken = check(&sources(&[("src/lib.rs", "fn")]));
    assert!(matches!(broken, Err(Error::Syntax { .. })), "{broken:?}");
}

/// Returns the text of a function with this number of lines.
fn function_with_lines(lines: usize) -> String {
    format!("fn long() {{\n{}}}\n", "    f();\n".repeat(lines - 2))
}

#[test]
fn a_function_over_80_lines_needs_a_reason_above_it() {
    let over = function_with_lines(81);
    let long = ["long-function src/lib.rs long"];
    assert!(finding_texts(&[("src/lib.rs", &function_with_lines(80))]).is_empty());
    assert_eq!(check_files(&[("src/lib.rs", &over)])[0].locations, ["src/lib.rs:1: 81 lines, at most 80"]);
    for (above, expected) in [
        ("", long.as_slice()),
        ("// long: a table\n", &[]),
        ("// long: a table\n// of all there is.\n/// Documented.\n#[must_use]\npub ", &[]),
        ("/// Documented.\n// long: a table\n#[must_use]\n", &[]),
        ("// long:\n", &long),
        ("// long: of another\nfn other() {}\n\n", &long),
    ] {
        assert_eq!(finding_texts(&[("src/lib.rs", &format!("{above}{over}"))]), expected, "{above}");
    }
    let method = format!("impl<T> Of<T> {{\n{over}}}\n#[cfg(test)] mod tests {{ {over} }}");
    let both = ["long-function src/lib.rs Of::long", "long-function src/lib.rs long"];
    assert_eq!(finding_texts(&[("src/lib.rs", &method)]), both);
}

#[test]
fn a_file_over_800_lines_needs_a_reason_at_its_top() {
    let items = |lines: usize| "fn f() {}\n".repeat(lines);
    assert!(finding_texts(&[("src/lib.rs", &items(800))]).is_empty());
    assert_eq!(finding_texts(&[("src/lib.rs", &items(801))]), ["long-file src/lib.rs"]);
    assert!(finding_texts(&[("src/lib.rs", &format!("//! A list.\n// long: a list\n{}", items(800)))]).is_empty());
    assert_eq!(finding_texts(&[("src/lib.rs", &format!("{}// long: late\n", items(800)))]), ["long-file src/lib.rs"]);
}

/// Returns the findings in a repository with one file and an empty library.
fn findings_beside_library(path: &str, text: &str) -> Vec<Finding> {
    let mut sources = sources(&[("src/lib.rs", "")]);
    sources.other_files.insert(path.to_owned(), text.to_owned());
    check(&sources).unwrap()
}

#[test]
fn a_comment_over_100_characters_is_found() {
    // Characters count, not bytes.
    let comment = |characters: usize| format!("// {}", "é".repeat(characters - 3));
    assert!(finding_texts(&[("src/lib.rs", &comment(100))]).is_empty());
    let text = format!("/{}\nfn f() {{\n    {}\n}}\n", comment(100), comment(97));
    let expected = Finding {
        description: "wide-comment src/lib.rs 2".to_owned(),
        locations: vec![
            "src/lib.rs:1: 101 characters, at most 100".to_owned(),
            "src/lib.rs:3: 101 characters, at most 100".to_owned(),
        ],
    };
    assert_eq!(check_files(&[("src/lib.rs", &text)]), [expected]);
}

#[test]
fn wide_comments_are_found_in_other_languages() {
    let words = "word ".repeat(25);
    for path in ["a.sh", "a/b.yaml", "a.yml", "a.toml", "a.py", "Makefile", "deploy/Containerfile"] {
        let expected = format!("wide-comment {path} 1");
        assert_eq!(findings_beside_library(path, &format!("  # {words}\nkey: {words}\n"))[0].description, expected);
    }
    assert_eq!(findings_beside_library("a.go", &format!("\t// {words}")).len(), 1);
    assert_eq!(findings_beside_library("e2e/test", &format!("#!/bin/sh\n# {words}")).len(), 1);
    for (path, text) in [
        ("LICENSE", format!("# {words}")),
        ("a.md", format!("# {words}")),
        ("a.go", format!("//go:generate {words}")),
        ("deploy/manifests.yaml", format!("# {words}")),
        ("crds/a.yaml", format!("# {words}")),
        ("Cargo.lock", format!("# {words}")),
        ("a.yaml", format!("# | {words} |")),
    ] {
        assert!(findings_beside_library(path, &text).is_empty(), "{path}");
    }
}

#[test]
fn a_line_that_is_an_address_may_be_wide() {
    let address = format!("https://example.com/{}", "a".repeat(100));
    for comment in [format!("// {address}"), format!("/// <{address}>"), format!("//! [name]: {address}")] {
        assert!(findings_beside_library("a.go", &comment).is_empty(), "{comment}");
    }
    assert_eq!(findings_beside_library("a.go", &format!("// See {address}")).len(), 1);
}

#[test]
fn each_line_of_the_list_allows_one_finding() {
    let finding = |description: &str| Finding { description: description.to_owned(), locations: Vec::new() };
    let findings = [finding("long-file a"), finding("long-file b"), finding("long-file b")];
    let none = ListDifference { new: Vec::new(), obsolete: Vec::new() };
    assert_eq!(known::compare_with_list(&findings, &known::format_list(&findings)), none);
    let listed = "# Comment\n\nlong-file b\nlong-file c\n";
    let expected = ListDifference { new: vec![&findings[0], &findings[2]], obsolete: vec!["long-file c"] };
    assert_eq!(known::compare_with_list(&findings, listed), expected);
}
