//! Links between pages, and the reports of users that tests answer.

use std::{fs, process::Command};

use crate::{read, root};

fn tracked(pattern: &str) -> Vec<String> {
    let git = Command::new("git")
        .args(["ls-files", "-z", pattern])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(git.status.success());
    let names = String::from_utf8(git.stdout).unwrap();
    names.split_terminator('\0').map(str::to_owned).collect()
}

fn links(page: &str) -> impl Iterator<Item = &str> {
    let targets = page
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next());
    targets.filter(|target| !target.contains("://"))
}

fn anchor(heading: &str) -> String {
    let kept = |letter: &char| letter.is_alphanumeric() || "-_ ".contains(*letter);
    let text: String = heading.to_lowercase().chars().filter(kept).collect();
    text.trim().replace(' ', "-")
}

#[test]
fn every_link_of_every_page_leads_to_a_file_and_a_heading() {
    let pages = tracked("*.md");
    assert!(pages.len() > 20, "{pages:?}");
    for page in pages {
        let path = root().join(&page);
        let text = fs::read_to_string(&path).unwrap();
        for link in links(&text) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let file = if file.is_empty() {
                path.clone()
            } else {
                path.parent().unwrap().join(file)
            };
            assert!(file.exists(), "{page} leads to {link}");
            if heading.is_empty() {
                continue;
            }
            let target = fs::read_to_string(&file).unwrap();
            let headings = target.lines().filter(|line| line.starts_with('#'));
            let mut anchors = headings.map(|line| anchor(line.trim_start_matches('#')));
            assert!(
                anchors.any(|anchor| anchor == heading),
                "{page} leads to {link}, which is no heading"
            );
        }
    }
}

/// A report of `demands.md` has tests with the comment `// scenario: NUMBER`.
#[test]
fn every_report_of_users_has_a_test_that_names_it() {
    let tests: String = tracked("*.rs").iter().map(|path| read(path)).collect();
    let page = read("services/docs/facts/demands.md");
    let first = |row: &str| row.strip_prefix("| ")?.split(' ').next()?.parse().ok();
    let numbers: Vec<u32> = page.lines().filter_map(first).collect();
    assert!(numbers.len() > 10, "{numbers:?}");
    for number in numbers {
        let tag = format!("// scenario: {number}\n");
        assert!(tests.contains(&tag), "report {number} has no test");
    }
}
